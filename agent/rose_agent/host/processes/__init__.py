"""What is run: engine classes, process trees, and what an earlier host left of them."""
