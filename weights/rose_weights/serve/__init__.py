"""The weight service and its relay: who may call, what they are answered."""
