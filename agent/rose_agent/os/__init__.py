"""What agents ask of Linux: process groups, cgroups, limits, capabilities; the ground floor."""
