from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["nf4"]
