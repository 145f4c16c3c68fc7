#include "seqlock.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

namespace headway {
namespace {

using Word = std::uint64_t;
using AtomicWord = std::atomic_ref<Word>;

constexpr std::size_t kWordBytes = sizeof(Word);
constexpr std::size_t kAttemptsPerYield = 16;

// Two processes share the words: an atomic that hides a lock in one of them would protect nothing.
static_assert(AtomicWord::is_always_lock_free);
static_assert(AtomicWord::required_alignment <= alignof(Word));

Word load(Word& word, std::memory_order order) { return AtomicWord(word).load(order); }
void store(Word& word, Word value, std::memory_order order) { AtomicWord(word).store(value, order); }

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

SeqlockHeader* header_at(void* buffer, std::size_t size_bytes) {
    if (buffer == nullptr) throw std::invalid_argument("buffer: must not be null");
    if (reinterpret_cast<std::uintptr_t>(buffer) % alignof(Word) != 0) {
        throw std::invalid_argument("buffer: must be aligned to 8 bytes");
    }
    if (size_bytes < kSeqlockHeaderBytes + kWordBytes) {
        throw std::invalid_argument("buffer: must hold at least " + std::to_string(kSeqlockHeaderBytes + kWordBytes) +
                                    " bytes, not " + std::to_string(size_bytes));
    }
    return static_cast<SeqlockHeader*>(buffer);
}

Word* words_at(void* buffer) {
    return reinterpret_cast<Word*>(static_cast<unsigned char*>(buffer) + kSeqlockHeaderBytes);
}

std::size_t payload_capacity(std::size_t size_bytes) {
    return (size_bytes - kSeqlockHeaderBytes) / kWordBytes * kWordBytes;
}

// The capacity a slot declares, once its magic, layout and capacity are known to be right.
std::size_t checked_capacity(SeqlockHeader& header, std::size_t size_bytes) {
    if (load(header.magic, kAcquire) != kSeqlockMagic) {
        throw std::invalid_argument("magic: the buffer is no snapshot slot");
    }
    if (const Word version = load(header.layout_version, kRelaxed); version != kSeqlockLayoutVersion) {
        throw std::invalid_argument("layout_version: this build reads " + std::to_string(kSeqlockLayoutVersion) +
                                    ", the slot is of " + std::to_string(version));
    }
    const Word capacity = load(header.capacity_bytes, kRelaxed);
    if (capacity == 0 || capacity % kWordBytes != 0 || capacity > payload_capacity(size_bytes)) {
        throw std::invalid_argument("capacity_bytes: " + std::to_string(capacity) + " does not fit a buffer of " +
                                    std::to_string(size_bytes) + " bytes");
    }
    return static_cast<std::size_t>(capacity);
}

void copy_in(Word* words, const unsigned char* payload, std::size_t payload_bytes) {
    const std::size_t num_whole = payload_bytes / kWordBytes;
    for (std::size_t i = 0; i < num_whole; ++i) {
        Word word;
        std::memcpy(&word, payload + i * kWordBytes, kWordBytes);
        store(words[i], word, kRelaxed);
    }
    if (const std::size_t rest = payload_bytes % kWordBytes; rest != 0) {
        Word word = 0;
        std::memcpy(&word, payload + num_whole * kWordBytes, rest);
        store(words[num_whole], word, kRelaxed);
    }
}

void copy_out(Word* words, unsigned char* out, std::size_t payload_bytes) {
    const std::size_t num_whole = payload_bytes / kWordBytes;
    for (std::size_t i = 0; i < num_whole; ++i) {
        const Word word = load(words[i], kRelaxed);
        std::memcpy(out + i * kWordBytes, &word, kWordBytes);
    }
    if (const std::size_t rest = payload_bytes % kWordBytes; rest != 0) {
        const Word word = load(words[num_whole], kRelaxed);
        std::memcpy(out + num_whole * kWordBytes, &word, rest);
    }
}

}  // namespace

SeqlockWriter::SeqlockWriter(void* buffer, std::size_t size_bytes)
    : header_(header_at(buffer, size_bytes)), words_(words_at(buffer)) {
    if (load(header_->magic, kAcquire) == 0) {
        store(header_->layout_version, kSeqlockLayoutVersion, kRelaxed);
        store(header_->capacity_bytes, payload_capacity(size_bytes), kRelaxed);
        store(header_->payload_bytes, 0, kRelaxed);
        store(header_->sequence, 0, kRelaxed);
        store(header_->magic, kSeqlockMagic, kRelease);
    }
    capacity_bytes_ = checked_capacity(*header_, size_bytes);
}

void SeqlockWriter::write(const void* payload, std::size_t payload_bytes) {
    if (payload_bytes > capacity_bytes_) {
        throw std::invalid_argument("payload: " + std::to_string(payload_bytes) + " bytes exceed the slot's capacity of " +
                                    std::to_string(capacity_bytes_));
    }
    if (payload == nullptr && payload_bytes != 0) throw std::invalid_argument("payload: must not be null");
    // `| 1` also carries on after a writer that died inside and left the sequence odd.
    const Word inside = load(header_->sequence, kRelaxed) | 1;
    store(header_->sequence, inside, kRelaxed);
    // No payload store may become visible before the odd sequence; none may lag behind the even one.
    std::atomic_thread_fence(kRelease);
    store(header_->payload_bytes, payload_bytes, kRelaxed);
    copy_in(words_, static_cast<const unsigned char*>(payload), payload_bytes);
    store(header_->sequence, inside + 1, kRelease);
}

SeqlockReader::SeqlockReader(const void* buffer, std::size_t size_bytes)
    // atomic_ref takes no const object in C++20; this class only loads, so a read-only mapping is fine.
    : header_(header_at(const_cast<void*>(buffer), size_bytes)),
      words_(words_at(const_cast<void*>(buffer))),
      capacity_bytes_(checked_capacity(*header_, size_bytes)) {}

std::uint64_t SeqlockReader::sequence() const { return load(header_->sequence, kAcquire) / 2; }

SeqlockRead SeqlockReader::read(std::string& out, std::size_t max_attempts, std::uint64_t* sequence) const {
    std::string copy;
    for (std::size_t attempt = 0; attempt < max_attempts; ++attempt) {
        if (attempt % kAttemptsPerYield == kAttemptsPerYield - 1) std::this_thread::yield();
        const Word before = load(header_->sequence, kAcquire);
        if (before == 0) return SeqlockRead::kEmpty;
        if (before % 2 != 0) continue;
        const Word payload_bytes = load(header_->payload_bytes, kRelaxed);
        if (payload_bytes > capacity_bytes_) continue;  // not written by a SeqlockWriter of this slot
        copy.resize(payload_bytes);
        copy_out(words_, reinterpret_cast<unsigned char*>(copy.data()), payload_bytes);
        std::atomic_thread_fence(kAcquire);  // the copy's loads stay before the second look at the sequence
        if (load(header_->sequence, kRelaxed) != before) continue;
        out.swap(copy);
        if (sequence != nullptr) *sequence = before / 2;
        return SeqlockRead::kOk;
    }
    return SeqlockRead::kTorn;
}

}  // namespace headway
