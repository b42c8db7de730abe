"""A receiver's side: ask for the way from one version to another, fetch its blocks."""
