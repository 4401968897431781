// A tile of Tiled-CSL (formats/tiled_csl.py) in shared memory: a dense window of 128 rows and 64 columns, padding words
// fall behind it.

#define TILE_BYTES (128 * 128)

__device__ __forceinline__ void scatter(u32 window, const uint4& q, bool ok) {
  sts16_if(window + (q.x >> 16), q.x, ok); sts16_if(window + (q.y >> 16), q.y, ok);
  sts16_if(window + (q.z >> 16), q.z, ok); sts16_if(window + (q.w >> 16), q.w, ok);
}

