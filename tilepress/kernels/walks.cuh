// Walks over the tiles of a weight, one for every NT columns of y: tiles, or units of them, are numbered through all
// walks, each block takes a run of them, last one first.

struct Cursor {
  int tile, column, walk;                     // of W, of W's columns of tiles

  __device__ Cursor(int number, int tiles, int k_blocks) {
    walk = number / tiles; tile = number - walk * tiles; column = tile % k_blocks;
  }
  __device__ void back(int tiles, int k_blocks) {
    if (--column < 0) column = k_blocks - 1;
    if (--tile < 0) { tile = tiles - 1; --walk; }
  }
};

// Blocks are numbered by their runs. With several walks neighbouring blocks take the same tiles in different ones at
// about the same time, and all but one find them in the L2 cache.
struct Runs {
  const int* cuts;                            // where runs begin, or null for as many tiles each
  int blocks, tiles;                          // of a walk

  __device__ Runs(const int* cuts, int walks, int tiles) : cuts(cuts), blocks(gridDim.x / walks), tiles(tiles) {}
  __device__ int mine(int walks) const {
    return walks == 1 ? blockIdx.x : blockIdx.x % walks * blocks + blockIdx.x / walks;
  }
  __device__ int operator()(int i) const {
    if (cuts) return __ldg(cuts + i);
    const int share = tiles / blocks, more = tiles % blocks, of_walk = i % blocks;
    return i / blocks * tiles + of_walk * share + min(of_walk, more);
  }
};
