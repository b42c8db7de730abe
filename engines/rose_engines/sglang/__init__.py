"""SGLang: how it is launched, what runs inside it (plugin) and how it is spoken to (client)."""
