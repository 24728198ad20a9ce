"""What ``exactknn --help`` and its commands say."""

DESCRIPTION = """\
Exact k-nearest-neighbour search: the same answer as float64 brute force, ties to the lowest row number,
identical for every CPU, thread count and batch.
"""

EPILOG = """\
example:
  exactknn search --query queries.fbin --reference base.fbin -k 100 --output neighbours.npz

exit codes:
  0 done   1 could not be done   2 refused (arguments or a file)   130 interrupted
"""

FORMATS = """\
Vectors are read from
  .npy, .npz           NumPy: one 2-D array of float16, float32, float64 or 8- or 16-bit integers, never pickled;
                       file.npz:name chooses among several arrays
  .fvecs, .bvecs, .ivecs
                       per row: int32 dimension, then float32, uint8 or int32 values
  .fbin, .u8bin, .i8bin
                       uint32 rows, uint32 dimension, then float32, uint8 or int8 values
Integers are searched as float32 values, which hold them exactly.
"""

SEARCH_DESCRIPTION = """\
Find the k nearest reference vectors of every query vector.

"""

SEARCH_EPILOG = """\
examples:
  # ids and distances in two files; formats of benchmarks: exactknn groundtruth
  exactknn search --query query.fvecs --reference base.fvecs -k 100 --output truth.ivecs --distances truth.fbin

  # neighbours of each row among the other rows
  exactknn search --query embeddings.npy -k 10 --metric cosine --output neighbours.npz

  # a reference that does not fit into memory; after Ctrl-C the same command goes on
  exactknn search --query query.fbin --reference base.fbin -k 100 --max-memory 2GB --resume search.state \\
      --output truth.ivecs

  # read the result
  python -c "import numpy; print(numpy.load('neighbours.npz')['indices'])"
"""

GROUNDTRUTH_DESCRIPTION = """\
Write the true neighbours of every query in a format that benchmarks of approximate indexes read.

The ground truth is written to
  .ivecs, .ibin        ids alone, int32 (TEXMEX; cuVS)
  .bin                 uint32 queries, uint32 k, then all ids, int32, then all distances, float32 (big-ann-benchmarks,
                       whose own files hold squared Euclidean distances or inner products)
  .hdf5, .h5           train (the base), test (the queries), neighbors and distances, attribute distance: euclidean, or
                       angular for --metric cosine (ann-benchmarks; not squared, 1 - similarity). Needs h5py
  .npz                 distances and indices

"""

GROUNDTRUTH_EPILOG = """\
examples:
  # ids and squared distances for big-ann-benchmarks
  exactknn groundtruth --base base.u8bin --query query.u8bin -k 100 --output truth.bin

  # ids as TEXMEX ships them, and their distances
  exactknn groundtruth --base base.fvecs --query query.fvecs --output truth.ivecs --distances truth.fvecs

  # among more vectors than fit into memory; after an interrupt the same command goes on
  exactknn groundtruth --base base.fbin --query query.fbin --output truth.bin --max-memory 8GB --resume truth.state

  # a data set for ann-benchmarks
  exactknn groundtruth --base base.npy --query query.npy --metric cosine --output mine-angular.hdf5
"""

EVALUATE_DESCRIPTION = """\
Score embeddings by retrieval: are the nearest references of a query of its class?

Vectors are read from the files that 'exactknn search' reads. Labels, one for each row, from
  .npy, .npz           NumPy: one 1-D array of integers, floats, booleans or text; file.npz:name chooses among several
  .txt, .csv           UTF-8 text, one label a line, no header; text that is all whole numbers is read as numbers
They are compared exactly.
"""

EVALUATE_EPILOG = """\
metrics (of one query; the value is the mean over queries that have a reference of their class):
  mean_average_precision         mean of the precisions at the ranks of all references of its class
  mean_average_precision_at_r    the same, only among the first R, R being how many references its class has
  mean_reciprocal_rank           1 / rank of the nearest reference of its class
  precision_at_1                 whether the nearest reference is of its class
  r_precision                    share of its class among the first R
  precision_at_<k>               share of its class among the first k
  recall_at_<k>, hit_rate_at_<k> whether any of the first k is of its class
  found_fraction_at_<k>          share of the references of its class that are among the first k
  ndcg_at_<k>                    discounted gain of the first k, 1 when the references of its class come first
  knn_accuracy_at_<k>            whether its class wins the vote of the first k
  knn_softmax_accuracy_at_<k>    the same, near ones counted more (temperature 0.07)

examples:
  # a validation set against itself, and a page to look at
  exactknn evaluate --embeddings val.npy --labels val_labels.npy --report report.html

  # queries against a gallery, by cosine distance
  exactknn evaluate --embeddings query.npy --labels query.csv --reference gallery.npy --reference-labels gallery.csv \\
      --distance cosine --metrics recall_at_1 recall_at_10 mean_average_precision_at_r --json
"""

MATCH_DESCRIPTION = """\
Find all pairs of vectors whose distance is at most a threshold, such as near-duplicates.

Without --reference the vectors are compared among themselves: every pair is written once, the lower row number first,
and no vector is paired with itself. The threshold is rounded to the type of the distances (float32, or float64 for
float64 vectors), so that a distance that was written matches at that number.

"""

MATCH_EPILOG = """\
examples:
  # near-duplicates in a file of embeddings
  exactknn match --query embeddings.npy --metric cosine --threshold 0.05 --output pairs.csv

  # rows of the test set that are in the training set
  exactknn match --query test.npy --reference train.npy --threshold 0 --output leaks.csv

  # read the result
  python -c "import numpy; print(numpy.load('pairs.npz')['query'])"
"""

INFO_EPILOG = """\
example:
  EXACTKNN_SIMD=avx2 exactknn info --json
"""
