"""What serving engines say and what the wire tap sees, turned into one ``ServingSignal``.

- ``segments``: TCP segments of one connection, put into the order of their bytes.
- ``tracker``: segments of one replica -> request events (arrival, first token, end).
- ``plain``, ``http2``: what a connection carries; ``http1``, ``h2frames``: framing.
- ``ledger``: requests under way, counted; the events about them.
- ``events``: those events, as the tap sends them to the guard.
- ``book``: the guard's picture of one replica, kept from the events.
- ``dialects``: figures that SGLang and vLLM publish.
- ``verify``: does the tap's request count agree with the engine's own?
- ``signal``: what a polled source said over time, and every source merged; *unknown* is a value of
  its own and closes the gate.

Pure: the sockets are in ``rose_agent.tap``, the HTTP readers in ``rose_agent.signals``.
"""
