"""A user for every engine, and the folders that are that user's."""
