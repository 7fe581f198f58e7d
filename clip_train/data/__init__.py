"""From shards to batches: which samples are in which global batch is a function of the seed and the
step alone.

`TrainLoader` gives each rank its share of every global batch, `ValLoader` the validation set;
`check_source` looks at the data before a job starts. `order.py` defines the order.
"""
