"""Which waiting turn goes to which engine, when it leaves, and where its context is warmed.

- ``views``: what is seen of turns and engines, the policy's knobs, the answers.
- ``selection``: hard filters, then one engine for one turn.
- ``scoring``, ``guards``: what it costs there, what narrows the choice.
- ``residency``: whose keys lie where. ``dispatch``: which waiting turn is next.
- ``watch``: when a running leg must end. ``warming``: what is prefilled while a tool runs.
"""
