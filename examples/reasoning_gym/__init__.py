"""Tasks of reasoning-gym over a lease, verified by the platform's reward functions.

Read ``play`` (questions to the lease, answers to ``rose rewards``), then ``checks`` (the function).
"""
