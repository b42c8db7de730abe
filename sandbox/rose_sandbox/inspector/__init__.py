"""What a turn changed in a sandbox, as the kernel saw it; start at ``inspector``."""
