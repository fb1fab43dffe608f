"""What has nothing to do with text or training: errors, files, locks, settings, command lines.

The lowest of the four packages: imports none of the others, and neither torch nor numpy.
"""
