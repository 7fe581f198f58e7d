"""The recipe: its sections, its errors, the changes allowed at a resume, the memory it needs."""
