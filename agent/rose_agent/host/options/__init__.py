"""Arguments of ``rose engine-host``, the files they name, and what is wrong with them."""
