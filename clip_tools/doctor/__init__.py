"""`clip-train doctor`: what will go wrong, before it does."""
