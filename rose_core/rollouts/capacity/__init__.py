"""What a router takes: its queue, the shares of jobs, memory, replicas, time to reply."""
