"""What serving engines say and what the wire tap sees, turned into one ``ServingSignal``.

- ``http1``: HTTP/1.1 message framing over byte streams that may have holes.
- ``tracker``: TCP segments of one replica -> request events (arrival, first token, end).
- ``events``: those events, as the tap sends them to the guard.
- ``book``: the guard's picture of one replica, kept from the events.
- ``dialects``: figures that SGLang and vLLM publish.
- ``verify``: does the tap's request count agree with the engine's own?
- ``signal``: every source merged; *unknown* is a value of its own and closes the gate.

Pure: the sockets are in ``rose_agent.tap``, the HTTP readers in ``rose_agent.signals``.
"""
