"""What the plan asks for, as objects: slots, and the routers of leases."""
