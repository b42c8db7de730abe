"""A lease's router replicas: who is alive, who owns which trajectory."""
