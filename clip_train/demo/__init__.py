"""What a first run needs that is not there: data sets made on the spot."""
