"""The dtypes of tensors in files, for numpy, to which ml_dtypes adds bfloat16."""

import ml_dtypes
import numpy as np

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
