"""Ask what `dflow serve run/model --grpc ADDRESS` serves: recommend.py HTTP_ADDRESS GRPC_ADDRESS user film user film"""

import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

http, grpc, *names = sys.argv[1:]
columns = {"user": np.array(names[::2], object), "film": np.array(names[1::2], object)}
for triton, address in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
    inputs = [triton.InferInput(name, ids.shape, "BYTES").set_data_from_numpy(ids) for name, ids in columns.items()]
    print(triton.InferenceServerClient(address).infer("model", inputs).as_numpy("result").tolist())
