"""What is known of one engine: its speed, who may have ended it, its drafts, the keys it keeps."""
