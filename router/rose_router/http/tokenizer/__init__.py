"""The model's tokenizer and chat template, where requests and answers need text."""
