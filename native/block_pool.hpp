// The KV blocks one by one, with a prefix cache: which block is whose, what it holds, and which is taken next.
//
// An exact mirror of vllm/v1/core/block_pool.py and the full-attention part of single_type_kv_cache_manager.py @0.32.0.
// Block contents are named by chained hashes, given with a request for its prompt and perhaps on into its answer; a
// full block beyond those is the request's own and can only be found by itself, after a preemption. A replay from counts
// has no pool. Requests are named by their slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace headway {

class BlockPool {
 public:
  BlockPool(int64_t num_blocks, int64_t block_size);

  // Introduces the request in `slot`, known under a number of its own, with the hashes of its first full blocks.
  void introduce(int32_t slot, uint64_t number, std::vector<uint64_t> hashes);
  int64_t num_free() const { return num_free_; }
  const std::vector<int32_t>& blocks(int32_t slot) const { return tables_[static_cast<size_t>(slot)].blocks; }

  // Finds the longest run of cached blocks from the start of a request's first `num_tokens` tokens, never the last one.
  // Returns how many; they stay found until the next call.
  int64_t find(int32_t slot, int64_t num_tokens) const;
  // The same for somebody who is not here, whose first full blocks have these hashes.
  int64_t find(const std::vector<uint64_t>& hashes, int64_t num_tokens) const;
  // Of the blocks found, those that nobody holds: taking them makes free blocks fewer.
  int64_t num_found_free() const;
  int64_t num_found() const { return static_cast<int64_t>(found_.size()); }
  // Gives the blocks found to a request that holds none.
  void take_found(int32_t slot);
  // Gives a request new blocks from the front of the free queue; what these held is lost.
  void take(int32_t slot, int64_t num_blocks);
  // Caches the full blocks among a request's first `num_tokens` tokens.
  void cache(int32_t slot, int64_t num_tokens);
  // Takes all blocks from a request.
  void release(int32_t slot);

 private:
  // What a full block holds: a hash given from outside (owner 0), or the n-th block of a request of its own.
  struct Content {
    uint64_t hash = 0;
    uint64_t owner = 0;
    bool operator==(const Content&) const = default;
  };
  struct ContentHash {
    size_t operator()(const Content& content) const {
      return static_cast<size_t>(content.hash * 0x9E3779B97F4A7C15ULL ^ content.owner * 0xC2B2AE3D27D4EB4FULL);
    }
  };
  struct Block {
    int32_t previous_free = -1;  // neighbours in the free queue
    int32_t next_free = -1;
    int32_t num_holders = 0;
    bool is_cached = false;
    int32_t previous_same = -1;  // neighbours among the cached blocks of the same content, in the order of caching
    int32_t next_same = -1;
    Content content;
  };
  struct Same {
    int32_t first;
    int32_t last;
  };
  struct Table {
    uint64_t number = 0;
    std::vector<uint64_t> hashes;
    std::vector<int32_t> blocks;
    int64_t num_cached = 0;
  };

  Block& at(int32_t block) { return blocks_[static_cast<size_t>(block)]; }
  Content content_of(const Table& table, size_t index) const;
  void link_free(int32_t block, int32_t before);
  void unlink_free(int32_t block);
  void uncache(int32_t block);

  int64_t block_size_;
  std::vector<Block> blocks_;  // block 0 is the null block; here it is the queue's anchor
  int64_t num_free_;
  std::unordered_map<Content, Same, ContentHash> cached_;
  std::vector<Table> tables_;  // by slot
  mutable std::vector<int32_t> found_;  // by the last find(), no state
};

}  // namespace headway
