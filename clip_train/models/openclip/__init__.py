"""Models that OpenCLIP builds, behind this project's interface. Needs `pip install 'clip-train[openclip]'`."""
