"""A replica's GPUs: engines that batch, two on one device, and the gates that stop one."""
