"""What is read: scenarios, traces, the guard's benchmark; and the reference of scenario files."""
