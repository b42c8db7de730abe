"""A batch file on a frozen lease, beside a serving engine under bursts: ``make bench-batches``."""
