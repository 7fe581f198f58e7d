"""The last import of a fork server: no process that it forks looks through what has been imported for garbage.

A full collection takes 0.3 s there, and each out-of-memory test asks for several.
"""

import gc

gc.collect()
gc.freeze()
