import streamlit as st


def show() -> None:
    st.title("Compare")
