"""A rank's life: who it is, how ranks meet, what watches over them, how a run ends."""
