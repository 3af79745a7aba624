"""Launch files that people have: found, read as a job and a plan, judged, and mended."""
