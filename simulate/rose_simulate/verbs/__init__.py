"""What ``rose simulate``, ``rose advise`` and ``rose cost`` do, a verb each, and the studies."""
