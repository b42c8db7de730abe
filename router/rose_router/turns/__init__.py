"""Turns: their queue, the legs they run in, what is booked of them."""
