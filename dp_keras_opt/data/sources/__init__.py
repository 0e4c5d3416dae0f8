"""Data that stay where they lie, and of which a batch is read at a time.

A source has a length, and gives the examples of an array of indices. What users have (arrays on
disk, record files, tables, folders of files) is made one by an adapter of this package. Packages
that an adapter needs are imported when it is used.
"""
