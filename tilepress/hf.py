"""`import tilepress.hf` makes transformers' from_pretrained load artifacts as `tilepress.load` does, alone and stacked:

- sparse layers (`quant_method: tilepress`), by a quantizer of our own;
- INT8 layers of compressed-tensors checkpoints, by the same quantizer, without that package; schemes that it does not run go to the stock one;
- the calibrated attention cache that a config names, put into models that generate. `attn_implementation=…` leaves it out: it brings its own attention;
- LoRA adapters of peft over such layers.

What from_pretrained does with other checkpoints stays as it is. A tool that takes a model only as a path needs no change: `python -m tilepress.hf
MODULE …` runs it as `python -m MODULE …` would, after that import.
"""

from tilepress.runtime.hf.from_pretrained import install

install()

if __name__ == "__main__":
    from tilepress.runtime.hf.bridge import main

    main()
