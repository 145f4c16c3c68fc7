#include "block_pool.hpp"

#include <algorithm>
#include <utility>

namespace headway {

namespace {

constexpr int32_t kAnchor = 0;  // before the first and behind the last block of the free queue

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, int64_t block_size)
    : block_size_(block_size), blocks_(static_cast<size_t>(num_blocks)), num_free_(0) {
  at(kAnchor).previous_free = at(kAnchor).next_free = kAnchor;
  for (int32_t block = 1; block < static_cast<int32_t>(num_blocks); ++block) link_free(block, kAnchor);
}

void BlockPool::introduce(int32_t slot, uint64_t number, std::vector<uint64_t> hashes) {
  if (tables_.size() <= static_cast<size_t>(slot)) tables_.resize(static_cast<size_t>(slot) + 1);
  tables_[static_cast<size_t>(slot)] = Table{number, std::move(hashes), {}, 0};
}

// ---------------------------------------------------------------- looking up and taking

BlockPool::Content BlockPool::content_of(const Table& table, size_t index) const {
  if (index < table.hashes.size()) return {table.hashes[index], 0};
  return {index, table.number};
}

// find_longest_cache_hit(): the last token is always computed, so the block it would complete is none.
int64_t BlockPool::find(int32_t slot, int64_t num_tokens) const {
  const Table& table = tables_[static_cast<size_t>(slot)];
  found_.clear();
  for (int64_t index = 0; index < (num_tokens - 1) / block_size_; ++index) {
    const auto same = cached_.find(content_of(table, static_cast<size_t>(index)));
    if (same == cached_.end()) break;
    found_.push_back(same->second.first);
  }
  return static_cast<int64_t>(found_.size());
}

int64_t BlockPool::find(const std::vector<uint64_t>& hashes, int64_t num_tokens) const {
  found_.clear();
  const int64_t most = std::min<int64_t>((num_tokens - 1) / block_size_, static_cast<int64_t>(hashes.size()));
  for (int64_t index = 0; index < most; ++index) {
    const auto same = cached_.find(Content{hashes[static_cast<size_t>(index)], 0});
    if (same == cached_.end()) break;
    found_.push_back(same->second.first);
  }
  return static_cast<int64_t>(found_.size());
}

int64_t BlockPool::num_found_free() const {
  return std::count_if(found_.begin(), found_.end(),
                       [this](int32_t block) { return blocks_[static_cast<size_t>(block)].num_holders == 0; });
}

// touch(): a cached block in the free queue leaves it.
void BlockPool::take_found(int32_t slot) {
  Table& table = tables_[static_cast<size_t>(slot)];
  for (const int32_t block : found_) {
    if (at(block).num_holders == 0) unlink_free(block);
    at(block).num_holders += 1;
    table.blocks.push_back(block);
  }
  table.num_cached = static_cast<int64_t>(table.blocks.size());
}

// get_new_blocks(): from the front of the queue.
void BlockPool::take(int32_t slot, int64_t num_blocks) {
  Table& table = tables_[static_cast<size_t>(slot)];
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int32_t block = at(kAnchor).next_free;
    unlink_free(block);
    if (at(block).is_cached) uncache(block);
    at(block).num_holders = 1;
    table.blocks.push_back(block);
  }
}

// cache_full_blocks(): equal contents are not merged, each block stays cached beside the others.
void BlockPool::cache(int32_t slot, int64_t num_tokens) {
  Table& table = tables_[static_cast<size_t>(slot)];
  for (; table.num_cached < num_tokens / block_size_; ++table.num_cached) {
    const size_t index = static_cast<size_t>(table.num_cached);
    const int32_t number = table.blocks[index];
    Block& block = at(number);
    block.content = content_of(table, index);
    block.is_cached = true;
    block.previous_same = block.next_same = -1;
    const auto [same, is_new] = cached_.try_emplace(block.content, Same{number, number});
    if (is_new) continue;
    block.previous_same = same->second.last;
    at(same->second.last).next_same = number;
    same->second.last = number;
  }
}

// ---------------------------------------------------------------- giving back

// free_blocks() of the blocks in reverse order: the cached ones go to the end of the queue, so that the tail of a request
// is evicted before its head, and those that hold nothing to be found (always a request's last) go to the front.
void BlockPool::release(int32_t slot) {
  Table& table = tables_[static_cast<size_t>(slot)];
  const int32_t front = at(kAnchor).next_free;
  for (auto block = table.blocks.rbegin(); block != table.blocks.rend(); ++block) {
    at(*block).num_holders -= 1;
    if (at(*block).num_holders == 0) link_free(*block, at(*block).is_cached ? kAnchor : front);
  }
  table.blocks.clear();
  table.num_cached = 0;
}

void BlockPool::link_free(int32_t block, int32_t before) {
  const int32_t previous = at(before).previous_free;
  at(block).previous_free = previous;
  at(block).next_free = before;
  at(previous).next_free = block;
  at(before).previous_free = block;
  num_free_ += 1;
}

void BlockPool::unlink_free(int32_t block) {
  at(at(block).previous_free).next_free = at(block).next_free;
  at(at(block).next_free).previous_free = at(block).previous_free;
  num_free_ -= 1;
}

void BlockPool::uncache(int32_t number) {
  Block& block = at(number);
  const auto same = cached_.find(block.content);
  (block.previous_same < 0 ? same->second.first : at(block.previous_same).next_same) = block.next_same;
  (block.next_same < 0 ? same->second.last : at(block.next_same).previous_same) = block.previous_same;
  if (same->second.first < 0) cached_.erase(same);
  block.is_cached = false;
}

}  // namespace headway
