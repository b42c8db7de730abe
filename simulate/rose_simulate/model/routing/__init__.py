"""A lease's router on virtual time; every choice is ``rose_core.rollouts``."""
