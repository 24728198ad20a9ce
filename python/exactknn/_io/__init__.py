"""Vector and label files in, result files out: the formats in which public nearest-neighbour benchmarks ship.

::

    Q.npy  Q.npz[:name]                 (NumPy)                      open_vectors           load
    Q.fvecs  Q.bvecs  Q.ivecs           (each row: d, d values)   -----------------> VectorFile -----> float array
    Q.fbin  Q.u8bin  Q.i8bin            (n, d, then all rows)      header checked,         values copied only
                                                                   file memory-mapped      where they have to be

    (distances, indices) ----> OutputFile: a temporary file in the folder of the output ----rename----> OUT.npz
                                                                                          .ivecs .ibin .bin .fvecs .fbin
    blocks of matching pairs ---> the same -------------------------------------------rename----> OUT.csv OUT.npz

Nothing here unpickles anything, and nothing is allocated from a number in a header before that number has been
compared with the size of the file. Every refusal is a `FileError` with a one-line text that begins with the path.
"""
