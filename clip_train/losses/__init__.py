"""The objectives, in closed form over tiles, behind one interface: `Objective`."""
