"""Results as HTML pages with plots, each of which stands alone."""
