"""Who may hold a GPU: the host's page, and ``rose vacate``, which asks it."""
