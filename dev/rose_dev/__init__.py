"""One-node Kubernetes, images and small models for development and tests."""
