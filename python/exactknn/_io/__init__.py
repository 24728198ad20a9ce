"""Reads vector and label files and writes result files, in the formats of public nearest-neighbour benchmarks.

::

    Q.npy  Q.npz[:name]                 (NumPy)                      open_vectors           load
    Q.fvecs  Q.bvecs  Q.ivecs           (each row: d, d values)   -----------------> VectorFile -----> float array
    Q.fbin  Q.u8bin  Q.i8bin            (n, d, then all rows)      header checked,         values copied only
                                                                   file memory-mapped      if necessary

    (distances, indices) ----> OutputFile: a temporary file in the folder of the output ----rename----> OUT.npz
                                                                                          .ivecs .ibin .bin .fvecs .fbin
    blocks of matching pairs ---> the same -------------------------------------------rename----> OUT.csv OUT.npz

Nothing is ever unpickled, and no size in a header is allocated before it has been checked against the file size. An
invalid file is a `FileError` with a one-line text that begins with the path.
"""
