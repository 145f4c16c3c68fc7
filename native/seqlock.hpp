// One shared-memory slot that one writer fills and any number of readers copy, without a lock.
//
// A reader never makes the writer wait, and never returns a payload that mixes two writes: the sequence is odd while
// the writer is inside, and a copy counts only when the sequence was the same even number before and after it. Every
// word is read and written through std::atomic_ref, so the copy itself is no data race (H.-J. Boehm, "Can seqlocks
// get along with programming language memory models?", MSPC 2012). This file knows neither Python nor what a payload
// means, maps no memory, and refuses a second writer only by its documentation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headway {

// The slot as both sides see it, in native byte order; payload words follow at kSeqlockHeaderBytes. All zero is a slot
// that no writer has opened.
struct SeqlockHeader {
    std::uint64_t magic;           // kSeqlockMagic, stored last by the first writer
    std::uint64_t layout_version;  // kSeqlockLayoutVersion
    std::uint64_t capacity_bytes;  // of the payload, a multiple of 8
    std::uint64_t sequence;        // 2 x completed writes, +1 while the writer is inside
    std::uint64_t payload_bytes;   // of the newest payload
};

inline constexpr std::uint64_t kSeqlockMagic = 0x5959415744414548;  // "HEADWAYY" on a little-endian machine
inline constexpr std::uint64_t kSeqlockLayoutVersion = 1;
inline constexpr std::size_t kSeqlockHeaderBytes = 64;  // one cache line: a reader's poll touches no payload line
static_assert(sizeof(SeqlockHeader) <= kSeqlockHeaderBytes);

enum class SeqlockRead {
    kEmpty,  // nothing was ever written
    kOk,
    kTorn,  // the writer was inside on every attempt
};

// Writes a slot. At most one writer per slot at a time; a later one carries the sequence on, also after a writer that
// died inside.
class SeqlockWriter {
  public:
    // Opens the slot at `buffer` (8-byte aligned, zeroed or left by an earlier writer; it must outlive this object).
    // Throws std::invalid_argument: buffer null, misaligned or too small, or not a slot of this layout.
    SeqlockWriter(void* buffer, std::size_t size_bytes);

    // Replaces the payload. Throws std::invalid_argument when it is larger than capacity_bytes().
    void write(const void* payload, std::size_t payload_bytes);

    std::size_t capacity_bytes() const { return capacity_bytes_; }

  private:
    SeqlockHeader* header_;
    std::uint64_t* words_;
    std::size_t capacity_bytes_;
};

// Copies the newest payload out of a slot.
class SeqlockReader {
  public:
    // Throws std::invalid_argument: buffer null, misaligned or too small, not a slot of this layout, or a capacity
    // beyond the buffer.
    SeqlockReader(const void* buffer, std::size_t size_bytes);

    // Number of completed writes; 0 before the first. One load.
    std::uint64_t sequence() const;

    // Copies the newest payload into `out` (left alone unless kOk). `sequence`, when given, receives the number of
    // completed writes the payload belongs to. Gives up the processor now and then, so that a writer that was
    // preempted inside can finish.
    SeqlockRead read(std::string& out, std::size_t max_attempts, std::uint64_t* sequence = nullptr) const;

    std::size_t capacity_bytes() const { return capacity_bytes_; }

  private:
    SeqlockHeader* header_;
    std::uint64_t* words_;
    std::size_t capacity_bytes_;
};

}  // namespace headway
