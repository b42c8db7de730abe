"""Ways for trainers that know nothing of ROSE to publish and report; see ``docs/trainers``.

- ``ingest``: full checkpoints in a folder, for trainers that push weights into "an engine" (slime,
  AReaL, prime-rl); the router's virtual engine calls it.
- ``report``: says what a step was trained on, for every trainer; the others here call it.
- ``slime``: two hooks of slime's own that call it.
- ``trl``: the object that TRL's asynchronous GRPO calls to send weights.
- ``skyrl``: the weight transfer strategy of SkyRL.
- ``verl``: client, checkpoint engine and checkpoint manager; ``verl_hooks`` hands them to verl.
"""
