"""Corpora, prepared with Dask on one host or many, and Dask's messages over MPI."""
