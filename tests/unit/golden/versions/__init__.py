"""What each released version wrote to disk and to the API server, kept; and how it read that.

``python -m tests.unit.golden.versions`` writes the folder of the version at hand anew. A folder of a version that was
released is never changed, and the newest is the version at hand.
"""
