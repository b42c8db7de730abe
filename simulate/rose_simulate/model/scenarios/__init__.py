"""What a simulation is told: scenarios, machines, measured costs, and what cannot exist."""
