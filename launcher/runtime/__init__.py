"""The life of a rank: its environment, the rendezvous, heartbeats and watchdog, and the end of a
run."""
