"""The recipe: its sections, what is wrong with it, what may change at a resume, the memory it
needs.
"""
